//! The register tile, written once for every vector width.

/// Makes a function that multiplies a few rows by one unpacked chunk of weights, with all sums
/// in registers. Every row is named, since arrays of vectors end up in memory; a base pointer
/// serves three rows, which the addressing modes reach by once and twice the stride.
macro_rules! register_tile {
    (
        $name:ident, $features:literal, $lanes:literal,
        ($zero:ident, $load:ident, $store:ident, $broadcast:ident, $multiply_add:ident),
        bases: $(($base:ident $first:literal))*,
        rows: $(($low:ident $high:ident $row:literal = $from:ident $times:literal))*
    ) => {
        /// Rows of a register tile; `weights` begins at the first of twice the vector's lanes.
        ///
        /// # Safety
        /// The machine has the features; otherwise as for [`super::panels::multiply`].
        #[target_feature(enable = $features)]
        unsafe fn $name(weights: &[f32], x: *const f32, y: *mut f32, tile: &Tile) {
            // SAFETY: the caller's contract; `weights` holds `PANEL` numbers for each input, less
            // at most the outputs before the tile.
            unsafe {
                let stride = tile.x_stride;
                $(let mut $base = x.add($first * stride);)*
                $(let (mut $low, mut $high) = if tile.fresh {
                    ($zero(), $zero())
                } else {
                    let y = y.add($row * tile.y_stride);
                    ($load(y), $load(y.add($lanes)))
                };)*
                let mut w = weights.as_ptr();
                for _ in 0..weights.len().div_ceil(PANEL) {
                    let (left, right) = ($load(w), $load(w.add($lanes)));
                    $(
                        let x = $broadcast(*$from.add($times * stride));
                        $low = $multiply_add(x, left, $low);
                        $high = $multiply_add(x, right, $high);
                    )*
                    $($base = $base.add(1);)*
                    w = w.wrapping_add(PANEL);
                }
                $(
                    $store(y.add($row * tile.y_stride), $low);
                    $store(y.add($row * tile.y_stride + $lanes), $high);
                )*
            }
        }
    };
}

pub(super) use register_tile;
