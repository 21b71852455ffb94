"""Which pod should a prompt go to? The formula, the loads it weighs, and the choices made lately."""
