"""`python -m shardline ...` and `torchrun -m shardline ...` are the same as `shardline ...`."""

import sys

from shardline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
