"""State on its way between the tries and the disk tier: out, back in, and after a restart."""
