"""What everything stands on: files written whole, bounds for what comes from outside, the device, lines for people."""
