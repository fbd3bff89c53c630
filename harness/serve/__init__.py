"""The serving-engine model: GPUs with continuous batching, in clusters, under either clock."""
