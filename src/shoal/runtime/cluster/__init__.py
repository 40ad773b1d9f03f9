"""Worker processes on one host or many: launching, control, supervision, Ray."""
