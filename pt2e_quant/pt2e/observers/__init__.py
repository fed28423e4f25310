"""Observers and fake-quantizes that only torchao's surface has."""
