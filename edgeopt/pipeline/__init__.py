"""The stage table, the stage cache, lowering, and the gates."""
