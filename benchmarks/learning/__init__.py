"""Training in simulation, as the papers do it: many networks at once, noisy gradients, personal models."""
