//! The published numbers: coefficients in milliseconds, capacities in tokens.
//!
//! From LLMServe/DistServe, `simdistserve/estimators/profile_data` (Apache-2.0): measured there on
//! A100-80GB SXM with fp16 weights, fitted by least squares on the relative error.

/// The engine, model and tensor parallelism of a coefficient set, and the set.
pub(super) struct Coefficients {
    /// Whose engine was measured.
    pub(super) engine: &'static str,
    /// The model, by its name in the model table.
    pub(super) model: &'static str,
    /// GPUs that share a layer.
    pub(super) tp: u32,
    /// Constant, per token, per token².
    pub(super) prefill: [f64; 3],
    /// Constant, per token of context, per row: below the threshold.
    pub(super) decode_small: [f64; 3],
    /// The same from the threshold on.
    pub(super) decode_large: [f64; 3],
}

/// Rows from which the large-batch set of decode holds, in every set.
pub(super) const LARGE_FROM: u32 = 95;

#[rustfmt::skip]
pub(super) const COEFFICIENTS: &[Coefficients] = &[
    Coefficients {
        engine: "distserve", model: "opt-13b", tp: 1,
        prefill: [18.10254647486372, 0.1019122572698738, 7.122264314252114e-6],
        decode_small: [19.934702624895458, 0.0006269356524350583, 0.03850697740828398],
        decode_large: [7.1661889468253595, 0.0005798000403396046, 0.15831096191764046],
    },
    Coefficients {
        engine: "distserve", model: "opt-13b", tp: 2,
        prefill: [14.742973695171262, 0.06857720739764, 2.4495727400243586e-6],
        decode_small: [13.294796350285385, 0.00034109219700723494, 0.06296393225243659],
        decode_large: [10.638741913126715, 0.00031183369638295723, 0.08562913604102729],
    },
    Coefficients {
        engine: "distserve", model: "opt-13b", tp: 4,
        prefill: [12.062297033449054, 0.03808140082550695, 5.226249731787869e-7],
        decode_small: [10.256231678259395, 0.00018786702316166354, 0.03269273629225551],
        decode_large: [10.483514938375274, 0.00017120888562939117, 0.04566648525887034],
    },
    Coefficients {
        engine: "distserve", model: "opt-66b", tp: 2,
        prefill: [43.05881348288936, 0.2742292870458432, 2.2478042467169447e-5],
        decode_small: [48.288015489286245, 0.0009424343535737985, 0.12755020094383188],
        decode_large: [28.727693993711597, 0.00047448475459061987, 0.29617792360743994],
    },
    Coefficients {
        engine: "distserve", model: "opt-66b", tp: 3,
        prefill: [32.998230028437035, 0.19568256864690514, 1.2205248980953765e-5],
        decode_small: [35.8015439512012, 0.0005845004786127403, 0.0952669764890301],
        decode_large: [22.653861586978355, 0.0005358489190129727, 0.208514444037787],
    },
    Coefficients {
        engine: "distserve", model: "opt-66b", tp: 4,
        prefill: [29.441636037717455, 0.151352180625198, 8.317450765979451e-6],
        decode_small: [30.760284619429587, 0.000451947603788462, 0.063284195750671],
        decode_large: [27.47082137429487, 0.0004046845541646486, 0.12480667738300383],
    },
    Coefficients {
        engine: "distserve", model: "opt-66b", tp: 8,
        prefill: [25.490662375045222, 0.10659177664763161, 3.3910502518615973e-6],
        decode_small: [23.15511135047022, 0.00022691488497826264, 0.04800638397272423],
        decode_large: [21.71772781576609, 0.0003758089655762475, 0.08978614175851013],
    },
    Coefficients {
        engine: "vllm", model: "opt-13b", tp: 1,
        prefill: [22.052204789310185, 0.14050923870128956, 8.076584822611088e-6],
        decode_small: [23.475041008414784, 0.000592934466077393, 0.060726861260369455],
        decode_large: [20.206356173691958, 0.0004907727036234946, 0.1200031385587413],
    },
    Coefficients {
        engine: "vllm", model: "opt-13b", tp: 2,
        prefill: [27.440806247810684, 0.0905453268062731, 8.452054313246025e-6],
        decode_small: [24.54058424191086, 0.00022440145424035404, 0.08715787269447899],
        decode_large: [17.947769467112806, 0.0004570851465217072, 0.11179075830699213],
    },
    Coefficients {
        engine: "vllm", model: "opt-13b", tp: 4,
        prefill: [30.536322590049405, 0.05150644936810146, 4.232473132942393e-7],
        decode_small: [25.90114444283343, 7.753634454230709e-5, 0.05528087160867803],
        decode_large: [23.88388468859458, 0.00028400164093310935, 0.06276523831046728],
    },
    Coefficients {
        engine: "vllm", model: "opt-66b", tp: 2,
        prefill: [58.3822026348141, 0.3826408030281867, -7.1141486747694485e-6],
        decode_small: [57.07344137197128, 0.0036461138777547255, 0.2249373634499222],
        decode_large: [26.983759428854572, 0.006200132376379982, 0.4482569479277445],
    },
    Coefficients {
        engine: "vllm", model: "opt-66b", tp: 3,
        prefill: [45.74453423698261, 0.2778127747865773, 3.64624693008797e-5],
        decode_small: [44.93958620555262, 0.0008096152552620141, 0.21287979591036174],
        decode_large: [43.69602916834496, 0.0008402567346080152, 0.24006467608312998],
    },
    Coefficients {
        engine: "vllm", model: "opt-66b", tp: 4,
        prefill: [42.965489361973944, 0.2128658422785494, 4.601017396226869e-5],
        decode_small: [39.58178936012414, 0.0006945721692406896, 0.13580868185596764],
        decode_large: [40.859718006896806, 0.0004264871259058686, 0.19508372547790553],
    },
    Coefficients {
        engine: "vllm", model: "opt-66b", tp: 8,
        prefill: [38.931193445523604, 0.1573682229779579, 4.531676245669589e-6],
        decode_small: [31.176041922273107, 0.00027556543631760213, 0.0679770397053775],
        decode_large: [29.087774405517447, 0.0006027720257746419, 0.1389608688300688],
    },
];

/// Model, tensor parallelism, pipeline stages and the tokens of KV that DistServe's engine holds.
#[rustfmt::skip]
pub(super) const CAPACITIES: &[(&str, u32, u32, u64)] = &[
    ("opt-13b", 1, 1, 66_144), ("opt-13b", 1, 2, 163_008), ("opt-13b", 1, 4, 356_752), ("opt-13b", 1, 5, 453_616), ("opt-13b", 1, 8, 744_224),
    ("opt-13b", 2, 1, 163_008), ("opt-13b", 2, 2, 356_752), ("opt-13b", 2, 4, 744_224), ("opt-13b", 2, 5, 937_968), ("opt-13b", 2, 8, 1_519_184),
    ("opt-13b", 4, 1, 356_736), ("opt-13b", 4, 2, 744_224), ("opt-13b", 4, 4, 1_519_168), ("opt-13b", 4, 5, 1_906_656), ("opt-13b", 4, 8, 3_069_088),
    ("opt-13b", 5, 1, 453_600), ("opt-13b", 5, 2, 937_952), ("opt-13b", 5, 4, 1_906_640), ("opt-13b", 5, 5, 2_390_992), ("opt-13b", 5, 8, 3_844_032),
    ("opt-13b", 8, 1, 744_208), ("opt-13b", 8, 2, 1_519_168), ("opt-13b", 8, 4, 3_069_072), ("opt-13b", 8, 5, 3_844_032), ("opt-13b", 8, 8, 6_168_896),
    ("opt-66b", 1, 2, 11_600), ("opt-66b", 1, 4, 78_512), ("opt-66b", 1, 8, 212_320),
    ("opt-66b", 2, 1, 11_600), ("opt-66b", 2, 2, 78_512), ("opt-66b", 2, 4, 212_320), ("opt-66b", 2, 8, 479_952),
    ("opt-66b", 3, 1, 45_056), ("opt-66b", 3, 2, 145_408), ("opt-66b", 3, 4, 346_128), ("opt-66b", 3, 8, 747_568),
    ("opt-66b", 4, 1, 78_496), ("opt-66b", 4, 2, 212_320), ("opt-66b", 4, 4, 479_936), ("opt-66b", 4, 8, 1_015_200),
    ("opt-66b", 6, 1, 145_408), ("opt-66b", 6, 2, 346_128), ("opt-66b", 6, 4, 747_568), ("opt-66b", 6, 8, 1_550_448),
    ("opt-66b", 8, 1, 212_304), ("opt-66b", 8, 2, 479_936), ("opt-66b", 8, 4, 1_015_184), ("opt-66b", 8, 8, 2_085_696),
    ("opt-175b", 1, 6, 26_208), ("opt-175b", 1, 8, 59_536),
    ("opt-175b", 2, 3, 26_208), ("opt-175b", 2, 4, 59_536), ("opt-175b", 2, 6, 126_160), ("opt-175b", 2, 8, 192_800),
    ("opt-175b", 3, 2, 26_208), ("opt-175b", 3, 3, 76_192), ("opt-175b", 3, 4, 126_160), ("opt-175b", 3, 6, 226_112), ("opt-175b", 3, 8, 326_064),
    ("opt-175b", 4, 2, 59_520), ("opt-175b", 4, 3, 126_160), ("opt-175b", 4, 4, 192_800), ("opt-175b", 4, 6, 326_064), ("opt-175b", 4, 8, 459_328),
    ("opt-175b", 6, 1, 26_208), ("opt-175b", 6, 2, 126_160), ("opt-175b", 6, 3, 226_112), ("opt-175b", 6, 4, 326_064), ("opt-175b", 6, 6, 525_968), ("opt-175b", 6, 8, 725_872),
    ("opt-175b", 8, 1, 59_520), ("opt-175b", 8, 2, 192_784), ("opt-175b", 8, 3, 326_048), ("opt-175b", 8, 4, 459_328), ("opt-175b", 8, 6, 725_856), ("opt-175b", 8, 8, 992_400),
];
