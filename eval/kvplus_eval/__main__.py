"""Runs the command line as `python -m kvplus_eval`, for launchers and places where `kvplus` isn't on the path.

Options without a command belong to `eval`: `accelerate launch -m kvplus_eval --suite full` evaluates.
"""

import sys

from hf_kvplus.cli import main

if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("--") and sys.argv[1] != "--help":
        sys.argv.insert(1, "eval")
    main()
