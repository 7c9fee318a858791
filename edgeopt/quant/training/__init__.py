"""Training: the loop over the user's batches, what it checks, keeps on disk, and shares between processes."""
