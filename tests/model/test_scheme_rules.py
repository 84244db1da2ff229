"""What docs/adding_a_scheme.md requires of the documentation of a scheme."""

import re

import pytest

from model import SCHEMES

SOURCE = re.compile(r"arXiv:\d{4}\.\d{4,5}|without a paper|He and Xu")


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_names_its_source_and_describes_its_settings(name):
    settings, scheme = SCHEMES[name]
    assert SOURCE.search(" ".join(f"{settings.__doc__} {scheme.__doc__}".split()))
    for key, field in settings.model_fields.items():
        assert key == "name" or len(field.description or "") > 8, key


# Schemes that look up a parameter or a bit for each whole distance or position.
WHOLE = {"binary", "learned", "t5", "shaw", "transformer_xl", "relative_logits"}


@pytest.mark.parametrize("name", SCHEMES)
def test_schemes_of_real_valued_positions(name):
    assert SCHEMES[name][1].supports_fractions == (name not in WHOLE)
