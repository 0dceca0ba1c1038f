"""Runs the command line as `python -m kvplus_eval`, for places where the `kvplus` script isn't on the path."""

from hf_kvplus.cli import main

if __name__ == "__main__":
    main()
