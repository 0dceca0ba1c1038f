"""Runs the command line as `python -m kvplus_eval`, for launchers and places where `kvplus` isn't on the path.

Options without a command belong to `eval`: `accelerate launch -m kvplus_eval --suite full` evaluates.
"""

import os
import sys

from hf_kvplus.cli import main
from kvplus_eval.launching import start_the_others, was_left_alone

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--") and sys.argv[1] != "--help":
        sys.argv.insert(1, "eval")
    if was_left_alone(os.environ):
        start_the_others(sys.argv[1:])
    main()
