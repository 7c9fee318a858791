"""The outside world: devices over SSH and here, the blob store on them, and the user's own code."""
