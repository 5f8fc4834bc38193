"""Recipes: each folder is one task, method or integration, written through the public interface of agent_r1."""
