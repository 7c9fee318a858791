"""What runs on the device: standard library only, Python 3.6 to 3.13, nothing of edgeopt imported.

The folder is packed as `onboard.pyz`. An application on the device puts that file on its path:

    sys.path.insert(0, "/home/nvidia/.edgeopt/NAME/current/onboard.pyz")
    import onboard
    with onboard.load("/home/nvidia/.edgeopt/NAME/current") as predictor:
        outputs = predictor.predict({"image": array})

and `python3 onboard.pyz run REQUEST RESPONSE` measures candidates (protocol in `run.py`).
"""

from .adaptive import AdaptiveModel
from .failures import Failure
from .predictor import Predictor, load

__all__ = ["AdaptiveModel", "Failure", "Predictor", "load"]
