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
