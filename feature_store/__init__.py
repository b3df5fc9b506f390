"""What is kept: features of images, and finding neighbours among them."""
