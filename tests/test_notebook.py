import json
import sys

import pytest

from toy import ROOT

FILE = ROOT / "examples" / "first_hour.ipynb"


def test_the_notebook_is_saved_without_outputs():
    cells = json.loads(FILE.read_text())["cells"]
    assert {cell["cell_type"] for cell in cells} == {"markdown", "code"}
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.slow
@pytest.mark.needs("nbclient", "pip install nbclient")
@pytest.mark.needs("ipykernel", "pip install ipykernel")
@pytest.mark.needs("matplotlib", "pip install matplotlib")
def test_the_notebook_trains_two_models_and_draws_what_they_learn(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PYTHON", sys.executable)
    monkeypatch.setenv("STEPS", "40")
    (tmp_path / "train.sh").symlink_to(ROOT / "train.sh")  # what it makes lies in the folder where it starts
    notebook = nbformat.read(FILE, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.get("text", "") for output in outputs)
    assert text.count("● green  Improved on ") == 2 and "after 40 steps" in text and "step 11/" not in text
    for run, figure in ("letters", "letters last"), ("digits", "digits right"):
        skill = json.loads((tmp_path / f"runs/first-hour-{run}/skill.json").read_text())
        assert skill["after"][f"{figure} T=0"][0] > skill["before"][f"{figure} T=0"][0] + 0.2, run
