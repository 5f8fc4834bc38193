"""Hold recipes: a folder per task, method or integration; they use the public interface."""
