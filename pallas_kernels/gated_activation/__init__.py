"""Gated activations: forward, backward, and backward fused with the MVUE pack."""
