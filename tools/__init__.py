import os
from pathlib import Path


def replace(path, text):
    """The whole file or nothing."""
    temporary = Path(f"{path}.tmp")
    temporary.write_text(text)
    os.replace(temporary, path)
