"""Programs without hpctrain. Each trains `STEPS` steps and saves every five."""
