(* The half of the verifier that is OCaml. ocaml_verifier.py compiles it and runs it in the toplevel, where it prepares
   itself once and then forks: each program that it accepts is compiled, run and judged in a process of its own. *)

open Stdlib

(* The toplevel was started with -nopervasives, so no name is in scope. *)
let nothing = Toploop.initialize_toplevel_env (); !Toploop.toplevel_env

(* All that a program can name. No function here has an effect, and none gives a value that could be changed. *)
let prelude = {|
external ( ~- ) : int -> int = "%negint"
external ( + ) : int -> int -> int = "%addint"
external ( - ) : int -> int -> int = "%subint"
external ( * ) : int -> int -> int = "%mulint"
external ( / ) : int -> int -> int = "%divint"
external ( mod ) : int -> int -> int = "%modint"
external ( ~-. ) : float -> float = "%negfloat"
external ( +. ) : float -> float -> float = "%addfloat"
external ( -. ) : float -> float -> float = "%subfloat"
external ( *. ) : float -> float -> float = "%mulfloat"
external ( /. ) : float -> float -> float = "%divfloat"
external ( = ) : 'a -> 'a -> bool = "%equal"
external ( <> ) : 'a -> 'a -> bool = "%notequal"
external ( < ) : 'a -> 'a -> bool = "%lessthan"
external ( > ) : 'a -> 'a -> bool = "%greaterthan"
external ( <= ) : 'a -> 'a -> bool = "%lessequal"
external ( >= ) : 'a -> 'a -> bool = "%greaterequal"
external ( && ) : bool -> bool -> bool = "%sequand"
external ( || ) : bool -> bool -> bool = "%sequor"
external ( |> ) : 'a -> ('a -> 'b) -> 'b = "%revapply"
external ( @@ ) : ('a -> 'b) -> 'a -> 'b = "%apply"
external not : bool -> bool = "%boolnot"
external raise : exn -> 'a = "%raise"
let failwith, invalid_arg = Stdlib.(failwith, invalid_arg)
let compare a b = Stdlib.compare a b
let max a b = if a >= b then a else b
let min a b = if a <= b then a else b
let abs, succ, pred, fst, snd = Stdlib.(abs, succ, pred, fst, snd)
let ( @ ), ( ^ ) = Stdlib.(( @ ), ( ^ ))
let float_of_int, int_of_float, sqrt = Stdlib.(float_of_int, int_of_float, sqrt)
let string_of_int, int_of_string, string_of_bool = Stdlib.(string_of_int, int_of_string, string_of_bool)
module List = struct
  let length, rev, append, concat = Stdlib.List.(length, rev, append, concat)
  let hd, tl, nth, init = Stdlib.List.(hd, tl, nth, init)
  let map, mapi, map2, filter, filter_map = Stdlib.List.(map, mapi, map2, filter, filter_map)
  let fold_left, fold_right, for_all, exists = Stdlib.List.(fold_left, fold_right, for_all, exists)
  let mem, assoc, assoc_opt, find, find_opt = Stdlib.List.(mem, assoc, assoc_opt, find, find_opt)
  let partition, split, combine, sort, sort_uniq = Stdlib.List.(partition, split, combine, sort, sort_uniq)
end
module String = struct
  let length, get, sub, concat, make, init = Stdlib.String.(length, get, sub, concat, make, init)
  let trim, split_on_char, contains = Stdlib.String.(trim, split_on_char, contains)
  let uppercase_ascii, lowercase_ascii = Stdlib.String.(uppercase_ascii, lowercase_ascii)
end
module Char = struct
  let code, chr = Stdlib.Char.(code, chr)
  let uppercase_ascii, lowercase_ascii = Stdlib.Char.(uppercase_ascii, lowercase_ascii)
end
|}

let parse text = !Toploop.parse_use_file (Lexing.from_string text)

let lone_expression text =
  match parse text with
  | [ Parsetree.(Ptop_def [ { pstr_desc = Pstr_eval (e, _); _ } ]) ] -> e
  | _ -> failwith text

(* Types, compiles and runs a phrase where the names of `scope` are known; returns the new scope. *)
let execute scope phrase =
  Toploop.toplevel_env := scope;
  if Toploop.execute_phrase false Format.err_formatter phrase then !Toploop.toplevel_env
  else failwith "it ended with an exception"

(* The inner wall: a syntax tree may have the nodes that are named below, and no other. So a program cannot bring in
   foreign code (external) or other modules, define types, catch exceptions, or change a value: there are no mutable
   fields, arrays, lazy values or objects. Nor are there guards, extensions, or attributes other than comments. *)

exception Refused

open Parsetree

let all = List.iter

let name = function
  | { Location.txt = Longident.(Lident _ | Ldot (Lident ("List" | "String" | "Char"), _)); _ } -> ()
  | _ -> raise Refused

let constant = function
  | Pconst_integer (_, None) | Pconst_float (_, None) | Pconst_char _ | Pconst_string (_, _, _) -> ()
  | _ -> raise Refused

let plain = all (fun a -> if a.attr_name.txt <> "ocaml.doc" then raise Refused) (* the parser's name for a comment *)

let rec core_type t =
  plain t.ptyp_attributes;
  match t.ptyp_desc with
  | Ptyp_any | Ptyp_var _ -> ()
  | Ptyp_arrow (Nolabel, t, u) -> core_type t; core_type u
  | Ptyp_tuple ts -> all core_type ts
  | Ptyp_poly ([], t) -> core_type t (* how the parser writes the type of `let f : t = ...` *)
  | Ptyp_constr ({ txt = Lident ("int" | "float" | "bool" | "char" | "string" | "unit" | "list" | "option"); _ }, ts) ->
    all core_type ts
  | _ -> raise Refused

let rec pattern p =
  plain p.ppat_attributes;
  match p.ppat_desc with
  | Ppat_any | Ppat_var _ -> ()
  | Ppat_constant c -> constant c
  | Ppat_interval (c, d) -> constant c; constant d
  | Ppat_construct ({ txt = Lident _; _ }, None) -> ()
  | Ppat_alias (p, _) | Ppat_construct ({ txt = Lident _; _ }, Some ([], p)) -> pattern p
  | Ppat_or (p, q) -> pattern p; pattern q
  | Ppat_tuple ps -> all pattern ps
  | Ppat_constraint (p, t) -> pattern p; core_type t
  | _ -> raise Refused

let rec expression e =
  plain e.pexp_attributes;
  match e.pexp_desc with
  | Pexp_ident id -> name id
  | Pexp_constant c -> constant c
  | Pexp_construct ({ txt = Lident _; _ }, e) -> Option.iter expression e
  | Pexp_tuple es -> all expression es
  | Pexp_apply (f, es) -> expression f; all (fun (label, e) -> unlabelled label; expression e) es
  | Pexp_fun (label, None, p, e) -> unlabelled label; pattern p; expression e
  | Pexp_function cases -> all case cases
  | Pexp_match (e, cases) -> expression e; all case cases
  | Pexp_sequence (e, f) -> expression e; expression f
  | Pexp_ifthenelse (e, f, g) -> expression e; expression f; Option.iter expression g
  | Pexp_let (recursive, bindings, e) -> all (binding recursive) bindings; expression e
  | Pexp_constraint (e, t) -> expression e; core_type t
  | _ -> raise Refused

and unlabelled label = if label <> Asttypes.Nolabel then raise Refused

and case c =
  if c.pc_guard <> None then raise Refused;
  pattern c.pc_lhs;
  expression c.pc_rhs

and binding recursive b =
  plain b.pvb_attributes;
  if recursive = Asttypes.Recursive && not (is_function b.pvb_expr) then raise Refused;
  pattern b.pvb_pat;
  expression b.pvb_expr

and is_function e = (* otherwise a value could contain itself *)
  match e.pexp_desc with
  | Pexp_fun _ | Pexp_function _ -> true
  | Pexp_constraint (e, _) -> is_function e
  | _ -> false

let definition = function
  | { pstr_desc = Pstr_value (recursive, bindings); _ } -> all (binding recursive) bindings
  | { pstr_desc = Pstr_attribute { attr_name = { txt = "ocaml.text"; _ }; _ }; _ } -> () (* a comment, too *)
  | _ -> raise Refused

let definitions text =
  let of_phrase = function Ptop_def items -> all definition items; items | Ptop_dir _ -> raise Refused in
  List.concat_map of_phrase (parse text)

(* The value of an argument, which the task wrote as a constant of OCaml. *)
let rec value e =
  match e.pexp_desc with
  | Pexp_constant (Pconst_integer (digits, _)) -> Obj.repr (int_of_string digits)
  | Pexp_constant (Pconst_float (digits, _)) -> Obj.repr (float_of_string digits)
  | Pexp_constant (Pconst_string (text, _, _)) -> Obj.repr text
  | Pexp_construct ({ txt = Lident "::"; _ }, Some { pexp_desc = Pexp_tuple [ x; rest ]; _ }) ->
    Obj.repr (value x :: Obj.obj (value rest))
  | Pexp_construct ({ txt = Lident "true"; _ }, None) -> Obj.repr true
  | Pexp_construct (_, None) -> Obj.repr 0 (* false, [] and () *)
  | Pexp_tuple es ->
    let block = Obj.new_block 0 (List.length es) in (* an array of numbers would not be a tuple of them *)
    List.iteri (fun i e -> Obj.set_field block i (value e)) es;
    block
  | _ -> failwith "this is not an argument"

(* Whether an argument that the task wrote has the type that its signature gives it. *)
let rec fits t e =
  match t.ptyp_desc, e.pexp_desc with
  | (Ptyp_any | Ptyp_var _), _
  | Ptyp_constr ({ txt = Lident "int"; _ }, []), Pexp_constant (Pconst_integer _)
  | Ptyp_constr ({ txt = Lident "float"; _ }, []), Pexp_constant (Pconst_float _)
  | Ptyp_constr ({ txt = Lident "string"; _ }, []), Pexp_constant (Pconst_string _)
  | Ptyp_constr ({ txt = Lident "bool"; _ }, []), Pexp_construct ({ txt = Lident ("true" | "false"); _ }, None)
  | Ptyp_constr ({ txt = Lident "unit"; _ }, []), Pexp_construct ({ txt = Lident "()"; _ }, None)
  | Ptyp_constr ({ txt = Lident "list"; _ }, [ _ ]), Pexp_construct ({ txt = Lident "[]"; _ }, None) -> true
  | Ptyp_constr ({ txt = Lident "list"; _ }, [ u ]), Pexp_construct (_, Some { pexp_desc = Pexp_tuple [ x; xs ]; _ }) ->
    fits u x && fits t xs
  | Ptyp_tuple ts, Pexp_tuple es -> List.length ts = List.length es && List.for_all2 fits ts es
  | _ -> false

(* The elements of a list that the task wrote. *)
let rec elements e =
  match e.pexp_desc with
  | Pexp_construct ({ txt = Lident "::"; _ }, Some { pexp_desc = Pexp_tuple [ x; rest ]; _ }) -> x :: elements rest
  | Pexp_construct ({ txt = Lident "[]"; _ }, None) -> []
  | _ -> failwith "this is not a list"

let rec fit t arguments =
  match t.ptyp_desc, arguments with
  | Ptyp_arrow (_, u, t), x :: rest -> fits u x && fit t rest
  | Ptyp_arrow _, [] | _, _ :: _ -> false
  | _, [] -> true

(* As Python's json reads it. *)
let show_float x =
  if x <> x then "NaN"
  else if x = infinity then "Infinity"
  else if x = neg_infinity then "-Infinity"
  else Printf.sprintf "%.17g" x

(* A result as JSON. *)
let rec show t v =
  let together shown = "[" ^ String.concat "," shown ^ "]" in
  match t.ptyp_desc with
  | Ptyp_constr ({ txt = Lident "int"; _ }, []) -> string_of_int (Obj.obj v)
  | Ptyp_constr ({ txt = Lident "bool"; _ }, []) -> string_of_bool (Obj.obj v)
  | Ptyp_constr ({ txt = Lident "float"; _ }, []) -> show_float (Obj.obj v)
  | Ptyp_constr ({ txt = Lident "string"; _ }, []) ->
    let shown = Buffer.create 80 in
    let add = function
      | ('\000' .. '\031' | '"' | '\\') as c -> Printf.bprintf shown "\\u%04x" (Char.code c)
      | c -> Buffer.add_char shown c
    in
    String.iter add (Obj.obj v);
    "\"" ^ Buffer.contents shown ^ "\""
  | Ptyp_constr ({ txt = Lident "list"; _ }, [ t ]) -> together (List.map (show t) (Obj.obj v))
  | Ptyp_tuple ts -> together (List.mapi (fun i t -> show t (Obj.field v i)) ts)
  | _ -> failwith "a result of this type cannot be shown"

let rec call t f arguments =
  match t.ptyp_desc, arguments with
  | _, [] -> show t f
  | Ptyp_arrow (_, _, t), x :: rest -> call t ((Obj.obj f : Obj.t -> Obj.t) x) rest
  | _ -> failwith "there are more arguments than the function takes"

(* The name and the type in a signature, which has been made a definition. *)
let name_and_type = function
  | [ { pstr_desc = Pstr_value (_, [ { pvb_pat = { ppat_desc = Ppat_constraint (
      { ppat_desc = Ppat_var f; _ }, { ptyp_desc = Ptyp_poly (_, t); _ }); _ }; _ } ]); _ } ] -> f.txt, t
  | _ -> failwith "a signature is a name with its type"

(* Prints how far the program came: "calls" if those of the task do not fit its signature, "type" if its definitions
   fail, otherwise "run", and then the results. "run" is printed before the calls, which may never end. *)
let judge scope items signature calls =
  let last = definitions signature and listed = lone_expression calls in
  let f, t = name_and_type last in
  match List.find_opt (fun call -> not (fit t (elements call))) (elements listed) with
  | Some { pexp_loc = { loc_start; loc_end; _ }; _ } ->
    print_endline "calls";
    print_string (String.sub calls loc_start.pos_cnum (loc_end.pos_cnum - loc_start.pos_cnum))
  | None ->
    match execute scope (Ptop_def (items @ last)) with
    | exception _ -> print_string "type"
    | _ ->
      print_endline "run";
      let result arguments = try call t (Toploop.getvalue f) arguments with _ -> "null" in
      let results = "[" ^ String.concat "," (List.map result (Obj.obj (value listed))) ^ "]" in
      if String.length results < 60000 then print_endline results (* else it would wait for room in its pipe *)

let written = Bytes.create 65536 (* what a pipe holds, and so the most that a process may write *)

(* What a forked process does: it refuses programs until one passes the inner wall, and judges that one. Text that is
   refused is data: it was parsed, and nothing of it was type-checked or run. So the process that refused it can take
   the next program, unless the text was so long that it may have filled the memory or the stack. Before a program is
   type-checked, the pipes to Python are closed; from then on the process can write to a pipe of its own, and nowhere
   else. The kernel ends the process when a program has used up its CPU time. *)
let rec grade scope own =
  match String.split_on_char ';' (read_line ()) with
  | exception End_of_file -> () (* Python has ended *)
  | lengths ->
    let parts = List.map (fun length -> really_input_string stdin (int_of_string length)) lengths in
    ignore Unix.(setitimer ITIMER_PROF { it_interval = 0.; it_value = 0.25 });
    match parts with
    | [ program; signature; calls ] ->
      (match definitions program with
      | exception _ when String.length program < 4096 -> Printf.printf "6\nsyntax%!"; grade scope own
      | exception _ -> ignore (Unix.write_substring own "syntax" 0 6)
      | items ->
        Unix.(dup2 own stdout; close own; close stdin);
        judge scope items signature calls)
    | _ -> failwith "a request has three parts"

(* Each process is forked before its first request comes. What it wrote to its own pipe is read when it has ended; if it
   does not end, Python ends this one as well. *)
let rec serve scope =
  let pipe, own = Unix.pipe () in
  match Unix.fork () with
  | 0 ->
    Unix.close pipe;
    grade scope own;
    flush stdout;
    Unix._exit 0
  | process ->
    Unix.close own;
    ignore (Unix.waitpid [] process);
    let count = Unix.read pipe written 0 (Bytes.length written) in
    Unix.close pipe;
    Printf.printf "%d\n%s%!" count (Bytes.sub_string written 0 count);
    serve scope

let () =
  let scope = List.fold_left execute nothing (parse prelude) in
  (* A page that a fork changes is copied first, and a garbage collection changes most of them. It would begin when half
     of the minor heap is full, but a program of ordinary length takes less. A fork also copies the table of all pages,
     so the major heap is made as small as possible. *)
  Gc.(set { (get ()) with minor_heap_size = 200000; space_overhead = 1 });
  Gc.compact ();
  Gc.(set { (get ()) with space_overhead = 1000 });
  (* A trial, which fails before "ready" if forks are forbidden. *)
  (match Unix.fork () with 0 -> Unix._exit 0 | process -> ignore (Unix.waitpid [] process));
  print_endline "ready";
  serve scope
