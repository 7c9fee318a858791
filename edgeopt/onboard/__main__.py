"""`python3 onboard.pyz run REQUEST RESPONSE` and `python3 onboard.pyz environment`."""

import sys


def start():
    from .run import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    start()
