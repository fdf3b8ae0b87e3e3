"""Steps of CPU tensors traced as on a CUDA device that is not at hand."""
