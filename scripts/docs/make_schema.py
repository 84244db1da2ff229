"""Write the JSON schemas of settings files to configs/schema.

  python scripts/docs/make_schema.py

Editors complete keys and report errors by the `yaml-language-server` line of each settings file; `--help` and
the check for misspelled settings read them without importing torch. A test compares them with the classes.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from evaluation import EvaluationSettings
from evaluation.diagnostics import AttentionDiagnosticSettings, GenerationDiagnosticSettings
from evaluation.tasks.settings import TaskEvaluationSettings
from run_directory.run_settings import RunSettings
from settings.schema import FOLDER, schema_text
from studies.study_settings import StudySettings

CLASSES = {
    "run": RunSettings,
    "study": StudySettings,
    "evaluation": EvaluationSettings,
    "tasks": TaskEvaluationSettings,
    "attention": AttentionDiagnosticSettings,
    "generation": GenerationDiagnosticSettings,
}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, cls in CLASSES.items():
        (FOLDER / f"{name}.json").write_text(schema_text(cls), encoding="utf-8")


if __name__ == "__main__":
    main()
