"""Replicas of one picture: what changes it goes through a log in Redis, and every replica applies that log."""
