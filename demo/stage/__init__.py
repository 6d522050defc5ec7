"""The demo's stage: what stands around the training script and the product's own programs."""
