"""Vision towers, and the parts that models of images and text share."""
