"""The harness's own `local-completions` against our server."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("tenacity")  # of lm-eval[api]

from lm_eval.models.openai_completions import LocalCompletionsAPI

from interop.harness.lm import SextantLM
from interop.server.serving import Limits
from run_directory.run import Run
from tests.interop.harness.models import byte_run, byte_tokenizer, instances
from tests.interop.harness.test_equality import PAIRS
from tests.interop.server.running import serving


@pytest.mark.slow
def test_local_completions_equal_the_adapter(tmp_path):
    run = byte_run(tmp_path / "run")
    byte_tokenizer().save_pretrained(tmp_path / "tokenizer")
    requests = instances("loglikelihood", *PAIRS[:10])
    with serving(Run.open(run).load(), Limits(rows=4)) as (address, _):
        theirs = LocalCompletionsAPI(
            model="run",
            base_url=f"{address}/v1/completions",
            tokenizer_backend="huggingface",
            tokenizer=str(tmp_path / "tokenizer"),
            add_bos_token=True,
        )
        found = theirs.loglikelihood(requests, disable_tqdm=True)
    expected = SextantLM(run).loglikelihood(requests, disable_tqdm=True)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx(
        [value for value, _ in expected], rel=1e-5
    )
