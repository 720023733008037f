"""Plans: which strategy each layer runs under, chosen by predicted time within a device's memory."""
