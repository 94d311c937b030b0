"""Multi-head latent attention for TokenSpeed. Import the modules by name; ``plugin`` imports none of them."""
