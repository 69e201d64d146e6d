"""Parts of a model that reads windows of large images: the scan, encoders of windows, and how answers are combined."""
