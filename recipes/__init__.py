"""Hold recipes: a folder per task, method or integration, which uses agent_r1's public
interface."""
