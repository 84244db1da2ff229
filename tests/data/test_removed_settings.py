"""Settings of data that earlier versions had."""

import pytest

from errors import ConfigError
from run_directory.run_settings import RunSettings
from settings.load import load_settings


def test_saved_runs_open_unless_a_removed_setting_changed_their_data(tmp_path):
    saved = tmp_path / "settings.yaml"
    saved.write_text("data: {group_bytes: null, skip: null, eos: false}\n")
    assert not load_settings(RunSettings, [str(saved)]).data.eos
    for setting in ("data.group_bytes", "data.skip"):
        with pytest.raises(ConfigError, match=setting):
            load_settings(RunSettings, [f"{setting}=9000"])
