"""`python3 onboard.pyz run REQUEST RESPONSE` and `python3 onboard.pyz environment`."""

import sys


def start():
    # Said in words that every Python parses: an older one would only show a SyntaxError of the next import.
    if sys.version_info < (3, 6):
        sys.exit("the runner needs Python 3.6 or newer, this is %d.%d" % sys.version_info[:2])
    from .run import main

    sys.exit(main(sys.argv[1:]))


if __name__ == "__main__":
    start()
