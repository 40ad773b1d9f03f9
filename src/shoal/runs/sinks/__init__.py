"""Where a run's scalars go beside its own files: TensorBoard, Weights & Biases, CSV, or yours."""
