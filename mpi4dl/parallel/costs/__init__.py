"""What the work of a plan takes: seconds of atoms on tiles, of messages, and where those numbers come from."""
