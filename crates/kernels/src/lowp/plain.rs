//! The plain references: one value at a time, in f64, by the definition. Only tests use them.

use super::minifloat::{Layout, Overflow};
use super::{Element, MxExponent, Scaling, Tile};

/// The value of a code, by the definition of a float.
pub fn decode(l: Layout, code: u32) -> f64 {
    let sign = if code >> l.magnitude_bits == 1 { -1.0 } else { 1.0 };
    let magnitude = code % (1 << l.magnitude_bits);
    let (exponent, fraction) = (magnitude >> l.mantissa, magnitude % (1 << l.mantissa));
    let unit = 2f64.powi(l.mantissa as i32);
    let lowest = 1 - l.bias as i32;
    if magnitude > l.max {
        if magnitude == l.infinity && l.infinity != l.nan { sign * f64::INFINITY } else { f64::NAN }
    } else if exponent == 0 {
        sign * f64::from(fraction) / unit * 2f64.powi(lowest)
    } else {
        sign * (1.0 + f64::from(fraction) / unit) * 2f64.powi(exponent as i32 - l.bias as i32)
    }
}

/// The code of `x`: the nearest finite code, searched among all of them as if the range went on by one step; of two as near,
/// the even one.
pub fn encode(l: Layout, overflow: Overflow, x: f32) -> u32 {
    let sign = if x.is_sign_negative() { 1 << l.magnitude_bits } else { 0 };
    if x.is_nan() {
        return l.nan | sign;
    }
    if x.is_infinite() {
        return sign | if overflow == Overflow::Saturate { l.max } else { l.infinity };
    }
    let x = f64::from(x).abs();
    // The step past the greatest value, as wide as the one before it.
    let past = 2.0 * decode(l, l.max) - decode(l, l.max - 1);
    let value = |code: u32| if code == l.max + 1 { past } else { decode(l, code) };
    // The greatest code that is not above x.
    let (mut low, mut high) = (0, l.max + 1);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if value(middle) <= x { low = middle } else { high = middle - 1 }
    }
    let code = if low > l.max {
        low
    } else {
        let (down, up) = (x - value(low), value(low + 1) - x);
        if up < down || (up == down && low % 2 == 1) { low + 1 } else { low }
    };
    sign | if code <= l.max {
        code
    } else if overflow == Overflow::NonSaturating {
        l.infinity
    } else {
        l.max
    }
}

/// The scales of `x` [rows, cols], tile by tile.
pub fn scales(element: Element, tile: Tile, scaling: Scaling, x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    let (down, across) = tile.grid(rows, cols);
    let (height, width) = match tile {
        Tile::Tensor => (rows, cols),
        Tile::Block { rows, cols } => (rows, cols),
    };
    let mut out = vec![];
    for i in 0..down {
        for j in 0..across {
            let (bottom, right) = (rows.min((i + 1) * height), cols.min((j + 1) * width));
            let values: Vec<f32> =
                (i * height..bottom).flat_map(|r| (j * width..right).map(move |c| x[r * cols + c])).collect();
            out.push(scale(element, scaling, &values));
        }
    }
    out
}

/// The scale of one tile.
fn scale(element: Element, scaling: Scaling, values: &[f32]) -> f32 {
    let nan = values.iter().any(|v| v.is_nan());
    let infinite = values.iter().any(|v| v.is_infinite());
    let amax = values.iter().filter(|v| v.is_finite()).fold(0f32, |m, v| m.max(v.abs()));
    let ratio = f64::from(amax) / f64::from(element.target());
    let power = |least: i32, n: f64| 2f64.powi((n as i32).clamp(least, 127)) as f32;
    if element == Element::Int8 && (nan || infinite) {
        return f32::NAN;
    }
    match scaling {
        Scaling::Fixed(scale) => scale,
        Scaling::Mx(_) if nan => f32::NAN,
        Scaling::Mx(_) if infinite => 2f32.powi(127),
        Scaling::Mx(_) if amax == 0.0 => 2f64.powi(-127) as f32,
        _ if amax == 0.0 => 1.0,
        Scaling::Amax => (amax / element.target()).max(f32::MIN_POSITIVE),
        Scaling::PowerOfTwo => power(-126, ratio.log2().ceil()),
        Scaling::Mx(MxExponent::Up) => power(-127, ratio.log2().ceil()),
        Scaling::Mx(MxExponent::Floor) => {
            power(-127, f64::from(amax).log2().floor() - f64::from(element.target()).log2().floor())
        }
    }
}
