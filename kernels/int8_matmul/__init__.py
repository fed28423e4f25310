"""Product of two int8 tensors that are both computed: attention's scores and values."""
