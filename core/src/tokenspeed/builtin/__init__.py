"""What core needs to run alone, contributed through the same hooks as any plugin."""
