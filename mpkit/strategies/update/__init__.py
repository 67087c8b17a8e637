"""From complete gradients to new weights: unscale, clip, step; master weights in 32 bits."""
