"""The command `convoy`, without loading torch."""

import os
import sys
from pathlib import Path


def main() -> None:
    program = Path(__file__).resolve().parent.parent / "convoy" / "bin" / "convoy"
    os.execv(program, [str(program), *sys.argv[1:]])
