"""The integration is imported when it is asked for, and its absence is one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIBRARIES = ("transformers", "accelerate", "datasets", "torch")


@pytest.mark.parametrize(
    "module", ["powertrain", "powertrain.huggingface", "powertrain.huggingface.transformers"]
)
def test_importing_it_imports_no_library(module: str) -> None:
    code = f"import sys, {module}; print([name for name in {LIBRARIES} if name in sys.modules])"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout == "[]\n"


@pytest.mark.parametrize(
    "line",
    [
        "from powertrain.huggingface.transformers import ReportCallback",
        "from powertrain.huggingface.transformers import RayTrainReportCallback",
        "from powertrain.huggingface.transformers import prepare_trainer; prepare_trainer(None)",
        "from powertrain.huggingface import TransformersTrainer; TransformersTrainer(print)",
    ],
)
def test_without_transformers_one_sentence_names_the_line_for_pip(line: str) -> None:
    code = f"import sys; sys.modules['transformers'] = None\n{line}"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert answer.returncode == 1
    said = answer.stderr.splitlines()[-1]
    assert said.startswith("ImportError: powertrain.huggingface needs transformers, which cannot be imported")
    assert said.endswith("pip install transformers accelerate")


def test_every_public_name_is_listed() -> None:
    import powertrain
    import powertrain.huggingface
    import powertrain.huggingface.transformers as ours

    assert powertrain.huggingface.transformers is ours
    assert set(ours.__all__) <= set(dir(ours))
    assert {"TransformersTrainer", "transformers"} <= set(dir(powertrain.huggingface))
    assert powertrain.huggingface.TransformersTrainer is ours.TransformersTrainer
    with pytest.raises(AttributeError, match="prepare_nothing"):
        ours.prepare_nothing  # noqa: B018
