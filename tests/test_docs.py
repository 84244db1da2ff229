"""The documentation matches the code."""

import importlib.util
import io
import json
import os
import random
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from evaluation.evaluation_settings import settings_class
from evaluation.reports import report
from model import SCHEMES, TokenPositions, Transformer
from tests.files import ROOT
from tests.interop.models import make
from tests.model.zoo import V, close, ids, initialized, settings_of
from tests.test_house import arrows, sources


def test_positions_page_matches_registry(monkeypatch, capsys):
    script = str(ROOT / "scripts" / "docs" / "document_positions.py")
    monkeypatch.setattr(sys, "argv", [script, "--check"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    assert not end.value.code, capsys.readouterr()


WALKTHROUGH = ROOT / "docs" / "adding_a_scheme.md"


def walkthrough() -> str:
    return WALKTHROUGH.read_text(encoding="utf-8")


# The name of each example's file, and its code.
EXAMPLES = dict(
    re.findall(
        r"`model/position/schemes/(\w+)\.py`:\n\n```python\n(.*?)```", walkthrough(), flags=re.S
    )
)


@torch.no_grad()
@pytest.mark.parametrize("name", ["root", "slow_rope"])
def test_walkthrough_examples_work(name, tmp_path, monkeypatch):
    """Its file is written, registered and run: full pass against cache and against NoPE."""
    model = example(name, tmp_path, monkeypatch)
    tokens = ids(2, 19)
    whole = model(tokens, TokenPositions.plain(19))
    cache = model.make_cache(2, 19)
    parts = [
        model(tokens[:, n : n + 1], TokenPositions.plain(1, offset=n), cache=cache)
        for n in range(19)
    ]
    close(torch.cat(parts, dim=1), whole)
    without = Transformer(settings_of({"name": "none"}), V, 11).initialize(0).double().eval()
    assert (without(tokens, TokenPositions.plain(19)) - whole).abs().max() > 1e-3
    assert len(EXAMPLES) == walkthrough().count("```python")


def add_scheme(folder: Path, code: str) -> None:
    """What the page says: one file, and one line of the registry."""
    (folder / "model/position/schemes/root.py").write_text(code, encoding="utf-8")
    registry = folder / "model/position/__init__.py"
    text = registry.read_text(encoding="utf-8")
    text = text.replace("schemes import (", "schemes import (\n    root,", 1)
    entry = re.search(r'add `("root": [^`]*)`', walkthrough())
    assert entry is not None
    registry.write_text(text.replace('"none": ', f'{entry[1]},\n    "none": ', 1), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_walkthrough_in_a_copy_of_the_tree(tmp_path):
    """The page's first example trains, has help and passes the tests that the page names."""
    command = ["git", "ls-files", ":!*.png", ":!docs/results"]
    listed = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in listed.stdout.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    add_scheme(tmp_path, EXAMPLES["root"])
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def status(*words: str) -> int:
        command = [sys.executable, *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, check=False).returncode

    (line,) = [line for line in commands(walkthrough()) if "pytest" in line]
    tests = status(*shlex.split(line)[1:], "-q", "-x", "-p", "no:cacheprovider")
    assert tests == 0
    (tmp_path / "texts").mkdir()
    for i in range(20):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"text {i} " * 400, encoding="utf-8")
    position = "model.position.name=root"
    text = ["--data", "texts", "data.tokenizer={name: bytes}", "data.valid_fraction=0.5"]
    train = ["train.py", "configs/tiny.yaml", position, *text, *MINIATURE, "--run-dir", "run"]
    assert status(*train) == 0
    assert status("train.py", "--help", "root") == 0
    changed = "model.position.stretch=2"
    assert status("generate.py", "run", "--prompt", "text", "--tokens", "4", changed) == 0


def example(name, folder, monkeypatch) -> Transformer:
    file = folder / f"{name}.py"
    file.write_text(EXAMPLES[name], encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"{name}_example", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    title = name.title().replace("_", "")
    settings = getattr(module, f"{title}Settings")
    scheme = getattr(module, title)
    monkeypatch.setitem(SCHEMES, name, (settings, scheme))
    shape = settings_of({"name": "none"}).model_copy(update={"position": settings()})
    return initialized(Transformer(shape, V, 11), 0).double().eval()


# Every command of the documents runs in a copy of the clone, on a run trained there by
# scripts/quickstart.sh in miniature: MINIATURE and SMALL are added.
PLACEHOLDERS = {
    "RUN": "runs/quickstart",
    "RUNS...": "runs/quickstart",
    "A": "runs/quickstart",
    "B": "runs/extension",
    "EXTENSION_RUN": "runs/extension",
    "RESULTS.json": "runs/quickstart/evaluation/quickstart/results.json",
    "FILE": "configs/studies/quick.yaml",
    "hf:FOLDER": "hf:llama",
    "tokenizer.model": "runs/quickstart/tokenizer/tokenizer.model",
    "N": "2",
}
TRAINED = {"runs/rope": "runs/quickstart", "runs/alibi": "runs/extension"}  # by an earlier line
TEXT = [
    "data.source={name: files, path: texts}",
    "data.tokenizer.vocab_size=320",
    "data.valid_fraction=0.7",
]
MINIATURE = [
    "train_length=256",
    "model.dim=16",
    "model.layers=4",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn_dim=24",
    "training.tokens=4K",
    "training.batch_size=4",
    "training.micro_batch_size=null",
    "training.compile=false",
    "training.validation={spans: 2, multiples: [1, 2]}",
    "training.samples.tokens=8",
]
SMALL = [
    "documents=3",
    "spans_per_document=1",
    "least_documents=1",
    "windows=2",
    "precision_windows=1",
    "prompts=2",
    "items=4",
    "haystacks=4",
    "length=512",
    "ngram=3",
]
# Scripts whose commands take minutes to hours, or that have a test of their own: only their --help
# runs.
LONG = [
    "benchmark",
    "check",
    "gpu_acceptance",
    "run_harness",
    "reference",
    "sample",
    "serve",
]
SHELL = re.compile(r"^(?:[A-Z_]+=\S+ )*(?:python|torchrun|accelerate|sbatch|bash|export|\.) ")


def documents() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[str]:
    """The Python code of a Markdown text."""
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M)


def commands(text: str) -> list[str]:
    """The shell commands of a Markdown text: those in fenced blocks, and inline code that begins
    like one."""
    found = []
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, flags=re.S | re.M):
        for line in block.replace("\\\n", " ").splitlines():
            if kind == "bash" or line.startswith("$ "):
                found.append(" ".join(line.removeprefix("$ ").split(" # ")[0].split()))
    outside = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    found += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", outside)]
    return [line for line in found if SHELL.match(line)]


def same_run(line: str) -> str:
    """Commands that differ only here are run once: the tests run a study's --dry-run alone."""
    return re.sub(r" --(jobs \d+|dry-run)", "", line) if "study.py" in line else line


COMMANDS = sorted(
    {same_run(line) for file in documents() for line in commands(file.read_text(encoding="utf-8"))}
)
BLOCKS = {
    f"{file.stem}-{i}": block
    for file in documents()
    if file != WALKTHROUGH
    for i, block in enumerate(blocks(file.read_text(encoding="utf-8")))
    if "gguf_file" not in block  # tests/interop/test_gguf.py makes the file
}


def text_for(words) -> list[str]:
    """The miniature text, whose folder a command may name itself."""
    return TEXT[1:] if "data.source.path=texts" in words else TEXT


class Clone:
    """A folder that looks like a clone with the quick start's run in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.statuses: dict[tuple[str, ...], int] = {}  # of the commands that ran
        for name in ("configs", "scripts", "docs", "tests/mutation", "tests/reference"):
            shutil.copytree(ROOT / name, folder / name)
        for file in ROOT.glob("*.py"):
            shutil.copy(file, folder)
        for file in sorted((folder / "configs/claims").glob("*.yaml"))[4:]:  # of a long list
            file.unlink()
        (folder / "texts").mkdir()
        rng = random.Random(3)
        words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(400)]
        shared = rng.choices(words, k=60)  # as source code repeats itself
        for i in range(30):
            text = " ".join(
                word for _ in range(5) for word in (*shared, *rng.choices(words, k=600))
            )
            (folder / "texts" / f"{i:02}.txt").write_text(text, encoding="utf-8")

    def run(self, *words: str) -> int:
        """Run a Python script in this process, so imports are paid once; returns its exit status. A
        command that ran before is not run again."""
        if words not in self.statuses:
            self.statuses[words] = self._run(*words)
        return self.statuses[words]

    def _run(self, *words: str) -> int:
        before = Path.cwd()
        argv = sys.argv
        stdin = sys.stdin
        os.chdir(self.folder)
        sys.argv = list(words)
        sys.stdin = io.TextIOWrapper(io.BytesIO())
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as left:
            return int(left.code or 0)
        finally:
            os.chdir(before)
            sys.argv = argv
            sys.stdin = stdin
        return 0

    def block(self, source: str) -> None:
        """A Python block of the documents, in the folder of the clone."""
        (self.folder / "block.py").write_text(source, encoding="utf-8")
        assert self._run("block.py") == 0

    def command(self, line: str) -> int:
        """A line of the documents as a reader would give it."""
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
        while words and ("=" in words[0] or words[0] == "export"):
            words.pop(0)
        if len(words) < 2 or words[0] == ".":
            return 0
        if words[0] == "bash":
            return subprocess.run(["bash", "-n", words[1]], cwd=ROOT, check=False).returncode
        if words[0] == "sbatch":
            script = next(word for word in words if word.endswith(".sh"))
            assert (ROOT / script).is_file()
            return self.python("train.py", *words[words.index(script) + 1 :], "--dry-run")
        scripts = [word for word in words if word.endswith(".py")]
        if "pytest" in words or not scripts:
            return 0  # test_walkthrough_in_a_copy_of_the_tree runs it, or it is a program's name
        script, *rest = words[words.index(scripts[0]) :]
        # These need the launcher's processes, or time.
        is_shared = any(word.startswith("context=") for word in rest)
        is_launched = words[0] == "accelerate" or (words[0] == "torchrun" and is_shared)
        return self.python(script, *rest, *(["--dry-run"] if is_launched else []))

    def python(self, script: str, *words: str) -> int:
        name = Path(script).stem
        if "--world" in words:  # in a process of its own, which its process group needs
            groups = ["training.batch_size=8"]  # a row for each context group
            command = [sys.executable, script, *words, *text_for(words), *MINIATURE, *groups]
            paths = os.environ | {"PYTHONPATH": str(ROOT)}
            return subprocess.run(command, cwd=self.folder, env=paths, check=False).returncode
        if script.startswith("tests/mutation"):
            pytest.importorskip("cosmic_ray")
        if name in LONG:
            return self.run(script, "--help")
        if name == "train" and "--help" not in words:
            return self.train(*words)
        # Tests of studies report, and plan what reads texts that are not here.
        is_elsewhere = re.search("claims/|new_scheme|ladder", words[0]) if words else None
        if name == "study" and ("--report" in words or is_elsewhere):
            return 0
        if name == "study" and "--dry-run" not in words:
            return self.run(script, words[0], "--dry-run")
        if name == "prepare":
            words = (*words, *text_for(words))
        if name == "evaluate":
            words = tuple(TRAINED.get(word, word) for word in words)
        if name == "evaluate" and "--help" not in words:
            known = settings_class(
                [word for word in words if not word.startswith(("--", "runs/"))]
            ).model_fields
            words = (*words, *(word for word in SMALL if word.split("=")[0] in known))
        return self.run(script, *words)

    def train(self, *words: str) -> int:
        # These inherit text and sizes, or are small and without text.
        if any(word.startswith("parent.run=") or "/symbols/" in word for word in words):
            return self.run("train.py", *words, "training.tokens=4K")
        return self.run("train.py", *words, *text_for(words), *MINIATURE)


@pytest.fixture(scope="module")
def clone(quickstart):
    """The clone, in which later evaluations draw coarse figures."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(report, "save", partial(report.save, dpi=40))
        yield quickstart


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Clone:
    """Everything that scripts/quickstart.sh does after it has installed the packages."""
    folder = tmp_path_factory.mktemp("clone")
    clone = Clone(folder)
    script = (ROOT / "scripts" / "quickstart.sh").read_text(encoding="utf-8")
    for line in re.findall(r"^python .*", script, flags=re.M):
        assert clone.command(line.replace('"$run"', "runs/quickstart")) == 0, line
    for line in (
        "configs/extension/yarn.yaml parent.run=runs/quickstart --run-dir runs/extension",
        "configs/tasks/symbols/copy.yaml --run-dir runs/copy",
    ):
        assert clone.train(*line.split()) == 0
    make("llama", vocab_size=320).save_pretrained(folder / "llama")
    shutil.copy(folder / "runs/quickstart/tokenizer/tokenizer.model", folder / "llama")
    return clone


def test_documents_contain_commands():
    assert len(COMMANDS) > 30
    assert "python evaluate.py RUN configs/evaluation/extension.yaml" in COMMANDS
    assert len(BLOCKS) >= 2


SLOW = ("--world", "study.py configs/studies/mup.yaml", "evaluate.py runs/quickstart --matrix")


@pytest.mark.parametrize(
    "line",
    [
        pytest.param(line, marks=pytest.mark.slow if any(one in line for one in SLOW) else ())
        for line in COMMANDS
    ],
)
def test_document_commands_run(clone, line):
    assert clone.command(line) == 0


@pytest.mark.parametrize("name", BLOCKS)
def test_document_python_blocks_run(clone, name):
    clone.block(BLOCKS[name])


def test_the_cells_for_one_gpu_run(clone):
    """As a script, with a small model."""
    notebook = json.loads((ROOT / "docs/notebooks/one_gpu.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(x["source"]) for x in notebook["cells"] if x["cell_type"] == "code"]
    assert len(cells) == 3
    source = re.sub("^%.*", "", "\n".join(cells), flags=re.M)
    small = ", ".join(map(repr, [*TEXT, *MINIATURE]))
    assert '"training.tokens=20M"' in source
    clone.block(source.replace('"training.tokens=20M"', small))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("default")  # Jupyter's own
def test_the_notebook_runs(clone, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(ROOT), *os.environ.get("PYTHONPATH", "").split()])
    )
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "quickstart.ipynb", as_version=4)
    resources = {"metadata": {"path": str(clone.folder)}}
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources=resources
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    options = ["--strict", "--site-dir", str(tmp_path / "site")]
    line = [sys.executable, "-m", "mkdocs", "build", *options]
    found = subprocess.run(
        line,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr


PATHS = re.compile(
    r"(?<![\w./-])(?:(?:model|data|training|evaluation|generation|studies|interop|scripts|configs|tests|docs)"
    r"/[\w*/.-]*[\w*/]|(?:train|generate|evaluate|study|sextant)\.py)"
)
LINKS = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Results of an older commit, which the page names.
DATED = {ROOT / "docs/results/mutation_sample.md"}


def prose(file: Path) -> str:
    """What a file says about Sextant: a document, or the comments of a settings file or shell
    script."""
    text = file.read_text(encoding="utf-8")
    if file.suffix in (".yaml", ".sh"):
        return "\n".join(re.findall(r"(?:^|\s)#(.*)", text))
    if file.name == "comparison.md":
        return text[text.index("## Sextant") :]
    return re.sub(r"https?://\S+", "", text.replace(r"\_", "_"))


def readable() -> list[Path]:
    found = [
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "configs").rglob("*.yaml"),
        *(ROOT / "scripts").rglob("*.sh"),
    ]
    return sorted({ROOT / "README.md", ROOT / "CONTRIBUTING.md", *found} - DATED)


@pytest.mark.parametrize("file", readable(), ids=lambda file: str(file.relative_to(ROOT)))
def test_document_paths_exist(file):
    text = prose(file)
    examples = {f"model/position/schemes/{name}.py" for name in EXAMPLES}
    outputs = set(re.findall(r"--out ([\w/]+)", text))
    missing = {path for path in PATHS.findall(text) if not any(ROOT.glob(path.rstrip("/")))}
    assert not missing - examples - outputs


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_document_links_resolve(name):
    """Links within docs/ are checked by the strict build of the site."""
    for link in LINKS.findall((ROOT / name).read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        if "://" not in link and not link.startswith("mailto:"):
            assert (ROOT / path).exists(), link
            if anchor:
                text = (ROOT / path).read_text(encoding="utf-8")
                titles = re.sub(r"[^\w #\n-]", "", text).lower().replace(" ", "-")
                assert re.search(rf"^#+-{anchor}$", titles, flags=re.M), link


ARCHITECTURE = ROOT / "docs" / "architecture.md"


def test_architecture_names_are_defined():
    """In the table of questions, a name in brackets after a file is defined there."""
    named = re.findall(r"`([\w/]+\.py)` \(`(\w+)`\)", ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(named) > 30
    for path, name in named:
        source = (ROOT / path).read_text(encoding="utf-8")
        definition = rf"^ *(class|def) {name}\b|^{name}\b.* = "
        assert re.search(definition, source, flags=re.M), (path, name)


def test_import_diagram_matches_imports():
    """Every import between packages is a path of arrows, and every arrow is an import."""
    text = ARCHITECTURE.read_text(encoding="utf-8")
    diagram = re.search(r"flowchart BT\n(.*?)```", text, flags=re.S)
    assert diagram is not None
    drawn = set(re.findall(r"(\w+)(?:\[[^\]]*\])? --> (\w+)", diagram[1]))
    packages = {name for arrow in drawn for name in arrow} - {"scripts"}
    assert packages == {f.parent.name for f in ROOT.glob("*/__init__.py")} - {"scripts", "tests"}
    imported = set()
    for file in sources():
        folder = file.relative_to(ROOT).parts[0]
        package = "scripts" if folder.endswith(".py") else folder
        targets = {name.split(".")[0] for _, name in arrows(file)} & packages
        imported |= {(package, target) for target in targets - {package}}
    imported = {arrow for arrow in imported if arrow[0] in {*packages, "scripts"}}
    reached = set(drawn)
    while more := {(a, d) for a, b in reached for c, d in drawn if b == c} - reached:
        reached |= more
    assert drawn <= imported <= reached, (drawn - imported, imported - reached)
