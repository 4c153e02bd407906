"""What training costs on many devices: on paper, from measured compute and the rates of links, and simulated."""
