//! Numbers for people: sizes, rates, times.

/// Bytes in binary units: `1.5 GiB`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1023.95 && unit < units.len() - 1 {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", units[unit]) }
}

/// A count in decimal units: `3.4 k`, `134.5 M`; below 1000 as it is.
pub fn count(n: f64) -> String {
    for (size, unit) in [(1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")] {
        if n.abs() >= size * 0.9995 {
            return format!("{:.1} {unit}", n / size);
        }
    }
    if n.fract() == 0.0 { format!("{n}") } else { format!("{n:.1}") }
}

/// A whole number with thousands set off: `1,234,567`.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// A time: `0.4 s`, `12 s`, `3:05`, `2:04:10`, `1 d 03:00`. `-` where it is not known.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "-".into();
    }
    if seconds < 9.95 {
        return format!("{seconds:.1} s");
    }
    let s = seconds.round() as u64;
    match s {
        0..60 => format!("{s} s"),
        60..3600 => format!("{}:{:02}", s / 60, s % 60),
        3600..86400 => format!("{}:{:02}:{:02}", s / 3600, s / 60 % 60, s % 60),
        _ => format!("{} d {:02}:{:02}", s / 86400, s / 3600 % 24, s / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn for_people() {
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(1024 * 1024 - 1), "1.0 MiB");
        assert_eq!(bytes(3 << 29), "1.5 GiB");
        assert_eq!(count(134_515_008.0), "134.5 M");
        assert_eq!(count(999.96), "1.0 k");
        assert_eq!(count(42.0), "42");
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(999), "999");
        assert_eq!(duration(0.42), "0.4 s");
        assert_eq!(duration(59.6), "1:00");
        assert_eq!(duration(185.0), "3:05");
        assert_eq!(duration(7450.0), "2:04:10");
        assert_eq!(duration(97_200.0), "1 d 03:00");
        assert_eq!(duration(f64::NAN), "-");
    }
}
