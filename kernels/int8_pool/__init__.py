"""Pooling of images in integers: max, average, adaptive and global average."""
