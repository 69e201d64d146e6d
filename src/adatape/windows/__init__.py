"""Parts of a model that reads windows of large images: where pixels come from, the scan, encoders, and answers."""
