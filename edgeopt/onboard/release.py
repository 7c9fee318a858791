"""The files of a release, or of an artifact's folder, that say what is in it."""

import json
import os


def read_manifest(folder):
    """The manifest in `folder`. ValueError where there is none."""
    return read_json(os.path.join(folder, "manifest.json"))


def read_json(path):
    """The value in the JSON file `path`. ValueError in words."""
    try:
        with open(path, encoding="utf-8") as f:
            return json.load(f)
    except OSError as error:
        raise ValueError("not a release: %s: %s" % (path, error.strerror)) from None
    except ValueError as error:
        raise ValueError("%s is not JSON: %s" % (path, error)) from None
