"""Range asymmetric numeral systems (rANS; Duda 2013, interleaved as by Giesen 2014), one format for both devices."""
