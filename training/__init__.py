"""Training: batches, optimizer, schedule, steps, metrics, checkpoints and distributed training."""
